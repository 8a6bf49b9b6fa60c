"""The one judge of image archives: what every verb believes of one, ``verify`` reports and all others refuse.

``outer`` reads an archive's bytes into ``contents``, ``layer`` reads a blob as a layer, ``archive`` holds the documents
(``oci``, ``docker``, ``image``) against them; ``sameness`` saves inflating what two archives hold. Findings are
collected; nothing stops at the first.
"""
